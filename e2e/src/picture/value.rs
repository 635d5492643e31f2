//! The text and the color of a number, from the settings of a panel.

use serde_json::Value;

use super::{TEXT, unit};

/// The settings of the column `name`: the defaults of the panel, replaced by the overrides for this name.
pub(super) fn config(panel: &Value, name: &str) -> Value {
    let mut config = panel["fieldConfig"]["defaults"].clone();
    let overrides = panel["fieldConfig"]["overrides"].as_array();
    for change in overrides.into_iter().flatten() {
        if change["matcher"]["options"] != name {
            continue;
        }
        for property in change["properties"].as_array().into_iter().flatten() {
            if let Some(id) = property["id"].as_str() {
                config[id] = property["value"].clone();
            }
        }
    }
    config
}

/// The text and the color of a number in a `stat` panel. The color comes from the value mapping, or from the thresholds
/// if the mapping has no color.
pub(super) fn shown(config: &Value, number: f64) -> (String, &'static str) {
    let unit = config["unit"].as_str().unwrap_or_default();
    let (text, color) = mapped(config, number);
    let text = text.unwrap_or_else(|| unit::shown(unit, number));
    (text, color.unwrap_or_else(|| of_thresholds(config, number)))
}

/// The text and the color of a number in a table. Only cells of the type `color-text` are colored.
pub(super) fn shown_in_table(config: &Value, number: f64) -> (String, &'static str) {
    let (text, color) = shown(config, number);
    let is_colored = config["custom.cellOptions"]["type"] == "color-text";
    (text, if is_colored { color } else { TEXT })
}

/// The text and the color from the value mapping for this number.
fn mapped(config: &Value, number: f64) -> (Option<String>, Option<&'static str>) {
    let mappings = config["mappings"].as_array().into_iter().flatten();
    let mut results = mappings.map(|mapping| &mapping["options"][number.to_string()]);
    let Some(result) = results.find(|result| result.is_object()) else {
        return (None, None);
    };
    let text = result["text"].as_str().map(str::to_owned);
    (text, result["color"].as_str().map(color))
}

/// The color of the last threshold that the number reaches. The lowest threshold has no value.
fn of_thresholds(config: &Value, number: f64) -> &'static str {
    let steps = config["thresholds"]["steps"].as_array();
    let is_reached = |step: &&Value| step["value"].as_f64().is_none_or(|value| number >= value);
    let reached = steps.into_iter().flatten().rfind(is_reached);
    reached.map_or(TEXT, |step| {
        color(step["color"].as_str().unwrap_or_default())
    })
}

/// The color with this name in Grafana's light theme.
fn color(name: &str) -> &'static str {
    match name {
        "green" => "#56a64b",
        "orange" => "#ff780a",
        "red" => "#e02f44",
        _ => TEXT,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn last_reached_threshold_sets_color() {
        let config = json!({"unit": "percentunit", "thresholds": {"steps": [
            {"value": null, "color": "green"},
            {"value": 0.8, "color": "red"},
        ]}});
        assert_eq!(shown(&config, 0.5), ("50 %".into(), "#56a64b"));
        assert_eq!(shown(&config, 0.8), ("80 %".into(), "#e02f44"));
        assert_eq!(shown(&json!({"unit": "none"}), 90.0).1, TEXT);
    }

    #[test]
    fn override_applies_value_mapping_to_one_column() {
        let mappings = json!([{"type": "value", "options": {"0": {"text": "No", "color": "red"}}}]);
        let panel = json!({"fieldConfig": {"defaults": {"unit": "none"}, "overrides": [{
            "matcher": {"id": "byName", "options": "Quorum"},
            "properties": [
                {"id": "mappings", "value": mappings},
                {"id": "custom.cellOptions", "value": {"type": "color-text"}},
            ],
        }]}});
        let quorum = config(&panel, "Quorum");
        assert_eq!(shown_in_table(&quorum, 0.0), ("No".into(), "#e02f44"));
        let other = config(&panel, "Voters");
        assert_eq!(shown_in_table(&other, 0.0), ("0".into(), TEXT));
    }
}
