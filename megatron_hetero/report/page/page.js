// Colour theme and copying: the page says everything without them.
(function () {
  var root = document.documentElement;
  var button = document.getElementById("theme");
  function isDark() {
    return root.dataset.theme
      ? root.dataset.theme === "dark"
      : window.matchMedia("(prefers-color-scheme: dark)").matches;
  }
  function show() { button.textContent = isDark() ? "light colours" : "dark colours"; }
  button.addEventListener("click", function () {
    root.dataset.theme = isDark() ? "light" : "dark";
    show();
  });
  button.hidden = false;
  show();
  document.querySelectorAll(".command").forEach(function (box) {
    if (!navigator.clipboard) { return; }
    var copy = document.createElement("button");
    copy.textContent = "copy";
    copy.addEventListener("click", function () {
      navigator.clipboard.writeText(box.querySelector("pre").textContent).then(function () {
        copy.textContent = "copied";
        setTimeout(function () { copy.textContent = "copy"; }, 1500);
      });
    });
    box.appendChild(copy);
  });
})();
