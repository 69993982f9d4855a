// A button in each heading sorts its table: first ascending, then descending. Numbers are compared by value.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  const read = (row, column) => row.cells[column].innerText.trim();
  const compare = (a, b) => {
    const [x, y] = [a, b].map((text) => parseFloat(text.replaceAll(",", "")));
    if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1;
    return isNaN(x) || x === y ? a.localeCompare(b, undefined, { numeric: true }) : x - y;
  };
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const order = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      body.append(...[...body.rows].sort((a, b) => sign * compare(read(a, column), read(b, column))));
    });
  });
}
