// Tables sort by a click on a heading: down, up, and as they were. Cells without a number stay last.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells], original = [...body.rows];
  const key = (row, column) => {
    const text = row.cells[column].innerText.replace(/\u2212/g, "-").replace(/,/g, "").trim();
    const number = parseFloat(text);
    return column && !heads[column].classList.contains("text") ? (isNaN(number) ? null : number) : text;
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = { none: "descending", descending: "ascending", ascending: "none" }[head.ariaSort || "none"];
      for (const other of heads) other.removeAttribute("aria-sort");
      if (next !== "none") head.setAttribute("aria-sort", next);
      table.classList.toggle("sorted", next !== "none");
      const rows = next === "none" ? original : original.map((row) => [key(row, column), row]).sort(([a], [b]) => {
        if (a === null || b === null) return (a === null) - (b === null);
        const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
        return next === "ascending" ? order : -order;
      }).map(([, row]) => row);
      body.append(...rows);
    });
  });
}
