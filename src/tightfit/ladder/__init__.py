"""Ladders: recipes that differ by one technique each, measured one after the other on the machine at hand.

| file | contents |
|---|---|
| `rungs` | a ladder, its rungs, the cards that it is of |
| `catalogue` | the ladders that have a name (`ladders.yaml`), that of a recipe, the guides' words (`guides.yaml`) |
| `run` | running a ladder: measuring, predicting, going on |
| `jobs`, `worker` | each rung in a process of its own |
| `two_devices` | rungs on two devices |
| `peers` | the same rungs by other trainers |
| `rows` | results, in an append-only file |
| `results` | results with their baselines, factors, front and ratios |
| `table`; `page`, `charts` | the terminal's table; the page and the picture |
"""
