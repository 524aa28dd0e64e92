"""What every op page stands on: registration, selection, replay, schemas, checks and the rules for memory."""
