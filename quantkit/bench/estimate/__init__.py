"""What a step should take on a card that is not here."""
