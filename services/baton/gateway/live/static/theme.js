// Applies the stored theme before the first paint. Without one, the system's setting decides.
"use strict";
{
  let stored = null;
  try { stored = localStorage.getItem("baton-theme"); } catch { /* storage is switched off */ }
  if (stored === "dark" || stored === "light") document.documentElement.dataset.theme = stored;
  document.addEventListener("DOMContentLoaded", () => {
    const warning = document.getElementById("plain");
    const isLocal = /^(localhost|.*\.localhost|127\..*|\[::1\])$/.test(location.hostname);
    if (warning) warning.hidden = location.protocol === "https:" || isLocal;
  });
}
