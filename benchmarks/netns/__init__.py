"""Network namespaces with real kernel links, for benchmarks and tests."""
