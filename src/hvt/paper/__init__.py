"""The paper's tables as data, and every cost that they print beside ours."""
