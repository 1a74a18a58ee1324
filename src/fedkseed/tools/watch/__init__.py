"""Views of a run from beside it, while another process works on it: in lines, on a terminal, and as a page."""
