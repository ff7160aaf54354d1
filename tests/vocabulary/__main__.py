import sys

from tests.vocabulary import search

found = list(search())
print(*found, f"{len(found)} left", sep="\n")
sys.exit(1 if found else 0)
