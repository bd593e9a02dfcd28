"""Tables, figures, verdicts and pages, made of stored runs."""
