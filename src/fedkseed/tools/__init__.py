"""What a person uses around runs: comparisons, range tests, fuzzing, reports, the terminal."""
