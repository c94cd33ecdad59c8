// Runs inside a report page and writes what it finds to data attributes of the body.
"use strict";
(() => {
  const problems = new Set();
  const LEAST_PX = 9;
  const isShown = (element) => element.getClientRects().length > 0 && getComputedStyle(element).visibility !== "hidden";
  const shownSvg = (figure) => [...figure.querySelectorAll("svg")].find(isShown);

  // Figures: drawn, with tooltips and legends.
  let drawn = 0;
  for (const figure of document.querySelectorAll("figure[data-figure]")) {
    const name = figure.dataset.figure;
    const svg = shownSvg(figure);
    const boxes = [...svg.querySelectorAll(".series, .line-row")].map((part) => part.getBBox());
    const box = svg.getBoundingClientRect();
    const isDrawn = boxes.reduce((sum, one) => sum + one.width, 0) > 1 && box.width > 100 && box.height > 20;
    if (isDrawn) drawn += 1;
    const at = { clientX: box.left + box.width * 0.6, clientY: box.top + box.height * 0.5, bubbles: true };
    (svg.querySelector("[data-tip], [data-point]") || svg).dispatchEvent(new PointerEvent("pointermove", at));
    const tip = document.querySelector(".tip");
    if (!tip.classList.contains("on") || !tip.textContent) problems.add(`no tip: ${name}`);
    svg.dispatchEvent(new PointerEvent("pointerleave"));
    const key = figure.querySelector(".key");
    if (key) {
      key.click();
      if (!svg.querySelector(".is-off")) problems.add(`legend does nothing: ${name}`);
      key.click();
    }
  }

  // Text in figures covers neither data nor other text, and stays inside of its card.
  const touches = (a, b, slack) => a.left < b.right - slack && b.left < a.right - slack && a.top < b.bottom - slack && b.top < a.bottom - slack;
  // The ink of a text: its box has room for accents and descenders, which these texts hardly use.
  const ink = (text) => {
    const box = text.getBoundingClientRect();
    const trim = box.height * 0.2;
    return { left: box.left, right: box.right, top: box.top + trim, bottom: box.bottom - trim };
  };
  const along = (path) => {
    const total = path.getTotalLength(), matrix = path.getScreenCTM();
    const count = Math.min(1500, Math.ceil(total / 2));
    return Array.from({ length: count + 1 }, (_, step) => path.getPointAtLength((total * step) / count).matrixTransform(matrix));
  };
  let texts = 0;
  for (const figure of document.querySelectorAll("figure[data-figure]")) {
    const name = figure.dataset.figure, svg = shownSvg(figure), card = figure.getBoundingClientRect();
    const all = [...svg.querySelectorAll("text")].map((text) => ({ words: text.textContent, box: ink(text) }));
    texts += all.length;
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    const smallest = Math.min(...[...svg.querySelectorAll("text")].map((text) => scale * parseFloat(getComputedStyle(text).fontSize)));
    if (smallest < LEAST_PX) problems.add(`text of ${smallest.toFixed(1)} pixels in ${name}`);
    const points = [...svg.querySelectorAll(".series path")].flatMap(along);
    const shapes = [...svg.querySelectorAll(".series circle, .line-row rect")].map((shape) => shape.getBoundingClientRect());
    all.forEach(({ words, box }, number) => {
      if (points.some((point) => point.x > box.left && point.x < box.right && point.y > box.top && point.y < box.bottom)) problems.add(`on a curve: ${words} in ${name}`);
      if (shapes.some((shape) => shape.width > 0 && touches(box, shape, 0.5))) problems.add(`on data: ${words} in ${name}`);
      if (box.left < card.left || box.right > card.right) problems.add(`outside of its card: ${words} in ${name}`);
      for (const other of all.slice(number + 1)) if (touches(box, other.box, 0.5)) problems.add(`${words} overlaps ${other.words} in ${name}`);
    });
  }

  // The page does not scroll sideways.
  const root = document.scrollingElement;
  if (root.scrollWidth > root.clientWidth) problems.add(`page scrolls: ${root.scrollWidth} of ${root.clientWidth} pixels`);

  // Text has a contrast of at least 4.5 (WCAG 2.2 AA).
  const parsed = (color) => {
    const found = color.match(/[\d.]+/g).map(Number);
    return { rgb: found.slice(0, 3), alpha: found[3] ?? 1 };
  };
  const background = (element) => {
    for (let one = element; one; one = one.parentElement) {
      if (one.tagName === "svg" || one instanceof SVGElement) continue;
      const { rgb, alpha } = parsed(getComputedStyle(one).backgroundColor);
      if (alpha > 0.99) return rgb;
    }
    return [255, 255, 255];
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((part) => part / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [light, dark] = [luminance(a), luminance(b)].sort((x, y) => y - x);
    return (light + 0.05) / (dark + 0.05);
  };
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, words = walker.currentNode.textContent.trim();
    if (!words || !isShown(element) || element.closest("title, script, style")) continue;
    const style = getComputedStyle(element);
    const color = parsed(element instanceof SVGElement ? style.fill : style.color).rgb;
    const found = contrast(color, background(element));
    if (found < 4.5) problems.add(`contrast ${found.toFixed(1)}: ${words.slice(0, 30)} (${element.className.baseVal ?? element.className})`);
  }

  Object.assign(document.body.dataset, {
    problems: [...problems].slice(0, 20).join("; "),
    drawn,
    texts,
    width: innerWidth,
    scheme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light",
  });
})();
