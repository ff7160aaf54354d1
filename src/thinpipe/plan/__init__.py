"""Whether a run fits, how fast it is and what it costs, before anything is rented. No torch here."""
