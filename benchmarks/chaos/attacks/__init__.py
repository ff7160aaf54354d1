"""What a hostile member of a chaos run does: a table of attacks, and the program that carries them out."""
