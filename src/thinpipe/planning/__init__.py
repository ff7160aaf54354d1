"""Planning: does a run fit on given machines, how fast is it, and what does it cost? Nothing is run; no torch."""
