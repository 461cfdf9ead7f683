"""The tables of benchmarks/README.md, each made from a record."""
