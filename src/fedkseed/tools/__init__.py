"""Tools around runs: comparisons, range tests, fuzzing, reports, output on the terminal."""
