"""Plan against fact: rows of cases and start-up logs, every difference with its cause."""
