"""Ladders: recipes that differ by one technique each, measured one after the other on the machine at hand.

| file | what is in it |
|---|---|
| `rungs` | what a ladder and its rungs are |
| `catalogue`, `published` | the ladders that have a name, and the figures that were published for them |
| `from_recipe` | a ladder of a person's own recipe |
| `climbs`, `climbing`, `predicting` | a ladder on its way, and taking it further |
| `cards` | the cards that it is predicted for |
| `jobs`, `processes`, `worker` | each rung in a process of its own |
| `rows` | what came out, in an append-only file |
| `contents` | the files that a rung's figures are of |
| `peers` | the same rungs by other trainers |
| `parallel`, `two_devices` | rungs on two devices |
| `recorded` | a ladder read back from that file |
| `lines`, `comparisons`, `effects` | what is worked out of it |
| `table`; `page`, `sections`, `figures`; `picture` | what a person sees: in the terminal, as a page, as a picture |
"""

LIMIT = 600.0
"""Seconds that one rung may take, where nothing else is asked for."""
