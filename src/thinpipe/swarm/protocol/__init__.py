"""Messages, invites, keys and reports that hub and peer exchange. Imports neither `hub` nor `peer`."""
