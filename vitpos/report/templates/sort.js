// Tables sort by a click on a heading: down, up, and as they were. Cells without a number stay last.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells], original = [...body.rows];
  const names = heads.map((head) => head.textContent.trim());
  const textual = (column) => !column || heads[column].classList.contains("text");
  const key = (row, column) => {
    const text = row.cells[column].textContent.trim(), number = parseFloat(text.replace(/\u2212/g, "-").replace(/,/g, ""));
    return textual(column) ? text : isNaN(number) ? null : number;
  };
  const sort = (column, direction) => {
    for (const head of heads) head.removeAttribute("aria-sort");
    if (direction !== "none") heads[column].setAttribute("aria-sort", direction);
    table.classList.toggle("sorted", direction !== "none");
    const rows = direction === "none" ? original : original.map((row) => [key(row, column), row]).sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
      return direction === "ascending" ? order : -order;
    }).map(([, row]) => row);
    body.append(...rows);
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      sort(column, { none: "descending", descending: "ascending", ascending: "none" }[head.ariaSort || "none"]);
    });
  });
  if (table.classList.contains("cards")) {  // on a narrow screen rows are cards and headings are not shown
    const select = document.createElement("select"), label = document.createElement("label");
    select.append(new Option("as listed", ""), ...names.map((name, column) => new Option(name, column)));
    select.addEventListener("change", () => {
      const column = Number(select.value);
      sort(column, select.value === "" ? "none" : textual(column) ? "ascending" : "descending");
    });
    label.className = "sort";
    label.append("Sort by ", select);
    table.closest(".scroll").before(label);
  }
}
// A table that goes on to the right fades out there.
for (const box of document.querySelectorAll(".scroll")) {
  const mark = () => box.classList.toggle("more", box.scrollWidth - box.clientWidth - box.scrollLeft > 2);
  box.addEventListener("scroll", mark, { passive: true });
  new ResizeObserver(mark).observe(box);
}
