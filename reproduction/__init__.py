"""The paper's tables, trained: what runs their rows and fills them with what was measured."""
