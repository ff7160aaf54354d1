"""The time of one planned optimiser step, by simulating its passes and messages. No torch here."""
