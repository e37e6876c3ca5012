"""Programs that train drafts for a target, and compare them: docs/how-to/train-a-draft.md."""
