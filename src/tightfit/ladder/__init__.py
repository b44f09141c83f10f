"""Ladders: recipes that differ by one technique each, measured one after the other on the machine at hand.

| file | contents |
|---|---|
| `rungs` | a ladder and its rungs |
| `catalogue` | the ladders that have a name (`ladders.yaml`), the guides' words (`guides.yaml`) |
| `from_recipe` | a ladder of a person's own recipe |
| `run` | running a ladder: measuring, predicting, going on |
| `jobs`, `worker` | each rung in a process of its own |
| `parallel`, `two_devices` | rungs on two devices |
| `peers` | the same rungs by other trainers |
| `rows` | results, in an append-only file |
| `results` | results with their baselines, factors, front and ratios |
| `cards` | the cards that a ladder is predicted for and was published on |
| `table`; `page`, `charts` | the terminal's table; the page and the picture |
"""

LIMIT = 600.0
"""Seconds that one rung may take, where nothing else is asked for."""
