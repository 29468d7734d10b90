"""What jaxbraid costs, goal by goal: `make bench`, or `python -m benchmarks.NAME` for one."""
