"""Benchmarks of the project, each by its name: `python tools/bench` lists them.

A benchmark is a module in one of the folders here.  Its docstring is its help, `OPTIONS` are
those of its command line, and `run` yields what it finds, as `show` prints it: titles of a table
(`Columns`), a row (a mapping of values, or its cells), lines of text, and a `Failure`.

* `__main__` is the command.
* `show` prints tables, or JSON.
* `jobs` has the clusters and models that several benchmarks plan.
* `alone` runs a function in a process of its own.
* `ranks` runs ranks over gloo and takes their times.
* `plans/` are about what a plan is worth, `search/` about the search that finds it, `schedules/`
  about orders, exchanges and deals by themselves, `runs/` about real processes, `serving/` about
  fleets.
"""
