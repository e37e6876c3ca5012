"""From raw runs to bars, plots and summary.json. All but `report` is pure, and tested in tests/unit/benchmarks."""
