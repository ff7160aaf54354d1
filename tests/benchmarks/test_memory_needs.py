"""The tables of docs/concepts/memory.md are what the cost model says today."""

from benchmarks.memory_needs import PAGE, with_tables


def test_the_page_has_the_tables_of_today():
    page = PAGE.read_text("utf-8")
    assert "| llama-32b | 32.76 B | bf16 |" in page
    assert with_tables(page) == page, "run python -m benchmarks.memory_needs"
