"""The training loop and what it needs: settings, the learning rate, the engine that computes, the console."""
