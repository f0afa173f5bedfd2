// Sets the theme before the page is shown. It is not deferred, so that a dark page never flashes.
(() => {
  "use strict";
  const chosen = (() => {
    try {
      return localStorage.getItem("meshpoint-theme");
    } catch {
      return null; // storage is disabled: follow the system
    }
  })();
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
