"""What pages share: element trees, panels, the token view, charts, the log view, state words."""
