"""What all benchmarks share; a benchmark is one file beside this package, and `CONTRIBUTING.md` has the recipe.

`benchmark`: a benchmark's cases, which run unless their rows are there; `options`: types of command-line options;
`processes`: a process for each case; `training`: checkpoints; `measuring`: checked results, memory and times;
`results`: rows that are never lost; `reports`: tables and pictures.
"""
