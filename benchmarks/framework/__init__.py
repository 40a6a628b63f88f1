"""Code that all benchmarks share. Each benchmark is one file beside this package; see `CONTRIBUTING.md`.

`benchmark`: a benchmark's cases, which run unless they have rows; `options`: types of command-line options;
`processes`: one process per case; `training`: checkpoints; `measuring`: checked results, memory and times;
`results`: rows that are never lost; `reports`: tables and pictures.
"""
