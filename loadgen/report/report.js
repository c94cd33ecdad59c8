"use strict";
(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  const figures = new Map(report.figures.map((figure) => [figure.id, figure]));
  const tip = document.createElement("div");
  tip.className = "tip";
  document.body.append(tip);

  const digits = (value) => {
    const size = Math.abs(value);
    const places = size === 0 || size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : Math.min(4, 2 - Math.floor(Math.log10(size)));
    const text = value.toFixed(places);
    return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
  };
  const written = (value, unit) => {
    if (unit === "ms") return Math.abs(value) >= 1000 ? digits(value / 1000) + " s" : digits(value) + " ms";
    if (unit === "share") return digits(value * 100) + " %";
    return digits(value) + (unit ? " " + unit : "");
  };
  const show = (event, text) => {
    tip.textContent = text;
    tip.classList.add("on");
    const box = tip.getBoundingClientRect();
    const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 14;
    const y = event.clientY + 14 + box.height > innerHeight ? event.clientY - 14 - box.height : event.clientY + 14;
    tip.style.left = Math.max(4, x) + "px";
    tip.style.top = Math.max(4, y) + "px";
  };
  const hide = () => tip.classList.remove("on");

  const crosshair = (svg, figure) => {
    const [left, top, right, bottom] = svg.dataset.frame.split(" ").map(Number);
    const axis = figure.x;
    const toValue = (share) => (axis.is_log ? axis.min * (axis.max / axis.min) ** share : axis.min + share * (axis.max - axis.min));
    const toShare = (value) => (axis.is_log ? Math.log(value / axis.min) / Math.log(axis.max / axis.min) : (value - axis.min) / (axis.max - axis.min));
    const line = document.createElementNS(svg.namespaceURI, "path");
    line.setAttribute("class", "cross");
    svg.append(line);
    const nearest = (points, value) => {
      let low = 0, high = points.length - 1;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (points[middle][0] < value) low = middle + 1; else high = middle;
      }
      return low > 0 && Math.abs(points[low - 1][0] - value) < Math.abs(points[low][0] - value) ? points[low - 1] : points[low];
    };
    const groups = [...svg.querySelectorAll(".series")];
    const named = (target) => figure.series[groups.indexOf(target.closest(".series"))].names[target.dataset.point];
    svg.addEventListener("pointermove", (event) => {
      const text = event.target.dataset.point ? named(event.target) : event.target.dataset.tip;
      if (text) { line.removeAttribute("d"); return show(event, text); }
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      if (x < left || x > right) { line.removeAttribute("d"); return hide(); }
      const value = toValue((x - left) / (right - left));
      const rows = figure.series.filter((series) => series.style !== "dots" && series.color !== "ideal" && series.points.length && !svg.querySelector(`.series[data-series="${series.key}"].is-off`));
      if (!rows.length) return hide();
      const at = toShare(nearest(rows[0].points, value)[0]);
      line.setAttribute("d", `M${left + Math.min(1, Math.max(0, at)) * (right - left)} ${top}V${bottom}`);
      const lines = rows.map((series) => {
        const point = nearest(series.points, value);
        return `${series.name}: ${written(point[1], figure.y.unit)} at ${written(point[0], axis.unit)}`;
      });
      show(event, lines.join("\n"));
    });
    svg.addEventListener("pointerleave", () => { line.removeAttribute("d"); hide(); });
  };

  for (const element of document.querySelectorAll("figure[data-figure]")) {
    const figure = figures.get(element.dataset.figure);
    for (const svg of element.querySelectorAll("svg")) {
      if (figure.kind === "lines") {
        crosshair(svg, figure);
      } else {
        svg.addEventListener("pointermove", (event) => (event.target.dataset.tip ? show(event, event.target.dataset.tip) : hide()));
        svg.addEventListener("pointerleave", hide);
      }
    }
    for (const key of element.querySelectorAll(".key")) {
      key.addEventListener("click", () => {
        const isOff = key.classList.toggle("off");
        for (const part of element.querySelectorAll(`svg [data-series="${key.dataset.series}"]`)) part.classList.toggle("is-off", isOff);
      });
    }
  }
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.dataset.wasOpen = one.open; one.open = true; }));
  addEventListener("afterprint", () => document.querySelectorAll("details").forEach((one) => { one.open = one.dataset.wasOpen === "true"; }));
})();
