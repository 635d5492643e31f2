// Long names in tables, such as spec.pod.persistentVolumeClaimSpec, may break between their words. Without such breaks, a name
// widens its column, or breaks at any letter.
for (const code of document.querySelectorAll("td code")) {
  if (code.textContent.length > 16) {
    code.innerHTML = code.innerHTML
      .replace(/[.,:/_=-](?=[\w"{[])/g, "$&<wbr>")
      .replace(/[a-z](?=[A-Z])/g, "$&<wbr>");
  }
}
