"use strict";
(() => {
  const data = JSON.parse(document.getElementById("series").textContent);
  const at = (points, x, step) => {
    let low = 0, high = points.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] <= x) low = middle + 1; else high = middle;
    }
    if (!low) return null;
    const [x0, y0] = points[low - 1];
    if (step || low === points.length) return y0;
    const [x1, y1] = points[low];
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0);
  };
  const clock = (s) => `${Math.floor(s / 60)}:${String(Math.floor(s % 60)).padStart(2, "0")}`;
  const tokens = (n) => n >= 1e9 ? `${(n / 1e9).toFixed(2)}B` : n >= 1e6 ? `${(n / 1e6).toFixed(2)}M` : `${(n / 1e3).toFixed(0)}k`;
  for (const plot of document.querySelectorAll("[data-hover]")) {
    const axis = plot.dataset.hover, isTime = axis === "time", {end, series} = data[axis];
    const box = plot.querySelector("svg"), readout = plot.querySelector(".readout");
    const cursor = document.createElementNS(box.namespaceURI, "line");
    cursor.setAttribute("class", "cursor");
    cursor.setAttribute("y1", "0");
    cursor.setAttribute("y2", "100%");
    cursor.style.display = "none";
    box.append(cursor);
    const hide = () => { cursor.style.display = "none"; readout.textContent = ""; };
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("pointermove", (event) => {
      const area = box.getBoundingClientRect(), share = (event.clientX - area.left) / area.width;
      if (share < 0 || share > 1) return hide();
      for (const side of ["x1", "x2"]) cursor.setAttribute(side, `${100 * share}%`);
      cursor.style.display = "";
      const texts = [isTime ? clock(share * end) : `${tokens(share * end)} tokens`];
      for (const [name, points] of series) {
        const value = at(points, share * end, isTime);
        if (value !== null) texts.push(`${name} ${isTime ? value : value.toFixed(4)}`);
      }
      readout.textContent = texts.join(" · ");
    });
  }
  addEventListener("beforeprint", () => { for (const d of document.querySelectorAll("details")) d.open = true; });
})();
