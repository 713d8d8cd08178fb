"""The kinds of draft (`base.Draft`), one per file. A draft proposes the target's next tokens."""
