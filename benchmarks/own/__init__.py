"""Our own boundary method against dense and against everything else in the registry."""
