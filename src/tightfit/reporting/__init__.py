"""What people see: a plan (`plan/`), the report of a profile (`report/`), and how far a search has come."""
