"""The search: the space of recipes, what each costs, which to choose, and why."""
