//! The model and the effort of a Codex thread. Pure.
//!
//! Codex keeps those of a turn for all later turns of the thread, also after a restart. A turn that
//! asks for none therefore names the defaults.

use std::collections::BTreeMap;

use harvest_proto::bridge::AgentLaunch;
use serde_json::Value;

use crate::agents::rpc::text;

/// The effort of a model that Codex does not know.
const DEFAULT_EFFORT: &str = "medium";

#[derive(Debug, Default)]
pub(super) struct Models {
    wanted: Setting,
    /// What the thread uses.
    current: Setting,
    /// The model of a thread that asks for none.
    default: Option<String>,
    default_efforts: BTreeMap<String, String>,
}

#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Setting {
    model: Option<String>,
    effort: Option<String>,
}

impl Models {
    /// Sets what the next turn uses.
    pub(super) fn want(&mut self, launch: &AgentLaunch) {
        let effort = launch.effort.map(|effort| effort.to_string());
        self.wanted = Setting { model: launch.model.clone(), effort };
    }

    /// Reads the reply to `model/list`.
    pub(super) fn learn_defaults(&mut self, list: &Value) {
        for model in list["data"].as_array().into_iter().flatten() {
            let name = text(model, "model").to_owned();
            if model["isDefault"] == true {
                self.default = Some(name.clone());
            }
            self.default_efforts.insert(name, text(model, "defaultReasoningEffort").to_owned());
        }
    }

    /// Reads the reply that opened the thread.
    pub(super) fn opened(&mut self, thread: &Value) {
        let field = |name: &str| thread[name].as_str().map(str::to_owned);
        self.current = Setting { model: field("model"), effort: field("reasoningEffort") };
    }

    /// The model that the thread uses.
    pub(super) fn current(&self) -> Option<&str> {
        self.current.model.as_deref().or(self.wanted.model.as_deref())
    }

    /// The fields of the next turn that differ from what the thread uses.
    pub(super) fn changes(&mut self) -> Vec<(&'static str, String)> {
        let model = self.wanted.model.clone().or_else(|| self.default.clone());
        let model = model.or_else(|| self.current.model.clone());
        let effort = match (&self.wanted.effort, &self.current.effort) {
            (Some(effort), _) => Some(effort.clone()),
            (None, Some(_)) => Some(self.default_effort(model.as_deref())),
            (None, None) => None,
        };
        let next = Setting { model, effort };
        let last = std::mem::replace(&mut self.current, next.clone());
        let model = next.model.filter(|model| last.model.as_ref() != Some(model));
        let effort = next.effort.filter(|effort| last.effort.as_ref() != Some(effort));
        [("model", model), ("effort", effort)]
            .into_iter()
            .filter_map(|(field, value)| Some((field, value?)))
            .collect()
    }

    fn default_effort(&self, model: Option<&str>) -> String {
        let known = model.and_then(|model| self.default_efforts.get(model));
        known.filter(|effort| !effort.is_empty()).map_or(DEFAULT_EFFORT, String::as_str).to_owned()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn models(thread: &Value) -> Models {
        let mut models = Models::default();
        models.learn_defaults(&json!({"data": [
            {"model": "big", "isDefault": true, "defaultReasoningEffort": "low"},
            {"model": "small", "isDefault": false, "defaultReasoningEffort": "medium"},
        ]}));
        models.opened(thread);
        models
    }

    fn next(models: &mut Models, model: Option<&str>, effort: Option<&str>) -> Vec<String> {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        models.wanted = Setting { model: owned(model), effort: owned(effort) };
        models.changes().into_iter().map(|(field, value)| format!("{field}={value}")).collect()
    }

    #[test]
    fn next_prompt_returns_to_the_defaults() {
        let mut models = models(&json!({"model": "big", "reasoningEffort": null}));
        assert_eq!(next(&mut models, None, None), [""; 0]);
        assert_eq!(next(&mut models, Some("own"), Some("high")), ["model=own", "effort=high"]);
        assert_eq!(next(&mut models, Some("own"), Some("high")), [""; 0]);
        assert_eq!(next(&mut models, None, None), ["model=big", "effort=low"]);
        assert_eq!(models.current(), Some("big"));
    }

    #[test]
    fn resumed_thread_keeps_no_old_model() {
        let mut models = models(&json!({"model": "own", "reasoningEffort": "high"}));
        assert_eq!(next(&mut models, Some("small"), None), ["model=small", "effort=medium"]);
        assert_eq!(next(&mut models, Some("own"), None), ["model=own"]);
    }
}
