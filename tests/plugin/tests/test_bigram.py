from pathlib import Path

from runnerd_spi.testing import conformance_tests

TestConformance = conformance_tests("bigram", model=str(Path(__file__).parents[1] / "corpus.txt"))
