// The table of verdicts: rows stay whose cells equal the values that are chosen and which hold every word that is typed.
// What is chosen stands behind # in the address, so that a view can be linked.
for (const place of document.querySelectorAll(".verdicts")) {
  const selects = [...place.querySelectorAll("select")], field = place.querySelector("input");
  const rows = [...place.querySelectorAll("tbody tr")], shown = place.querySelector("output");
  const texts = rows.map(row => row.textContent.toLowerCase());
  const view = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row, i) => {
      row.hidden = selects.some(each => each.value && row.cells[each.dataset.column].textContent !== each.value)
        || !words.every(word => texts[i].includes(word));
    });
    shown.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length}`;
  };
  const given = new URLSearchParams(location.hash.slice(1));
  const name = each => each.parentElement.firstChild.textContent.trim();
  for (const each of [...selects, field]) {
    each.value = given.get(name(each)) ?? each.value;
    each.addEventListener("input", () => {
      view();
      const set = [...selects, field].filter(other => other.value).map(other => [name(other), other.value]);
      history.replaceState(null, "", `#${new URLSearchParams(set)}`);
    });
  }
  view();
}
