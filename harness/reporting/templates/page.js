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
