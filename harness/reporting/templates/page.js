for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], stored = [...body.rows], heads = [...table.tHead.rows[0].cells];
  const words = new Intl.Collator("en", { numeric: true });
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent.trim() : cell.dataset.v;
  };
  heads.forEach((head, column) => {
    const label = head.querySelector(".h"), number = head.classList.contains("num");
    if (!label || stored.length < 2) return;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "h";
    button.append(...label.childNodes);
    label.replaceWith(button);
    head.setAttribute("aria-sort", "none");
    const orders = number ? ["descending", "ascending", "none"] : ["ascending", "descending", "none"];
    button.addEventListener("click", () => {
      const next = orders[(orders.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
      for (const other of heads) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", next);
      const sign = next === "ascending" ? 1 : -1;
      const sorted = [...stored].sort((one, two) => {
        const a = value(one, column), b = value(two, column);
        if (a === "" || b === "") return (a === "") - (b === "");
        return sign * (number ? a - b : words.compare(a, b));
      });
      body.append(...(next === "none" ? stored : sorted));
    });
  });
}
for (const code of document.querySelectorAll("pre > code")) {
  const button = document.createElement("button"), text = code.textContent;
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {  // no clipboard for a page from a file, or not allowed: the selection is copied
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  code.parentElement.previousElementSibling.append(button);
}
