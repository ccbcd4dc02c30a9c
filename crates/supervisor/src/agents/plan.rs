//! The plan that some agents keep through a tool whose argument `todos` is the whole list.

use harvest_proto::{
    EventBody,
    event::{PlanStep, StepStatus},
};
use serde_json::Value;

/// The plan in the input of such a tool.
pub(super) fn in_tool_input(input: &Value) -> Option<EventBody> {
    plan(input.get("todos")?, "content")
}

/// The plan in this list, whose steps have their text in `field`.
pub(super) fn plan(steps: &Value, field: &str) -> Option<EventBody> {
    let step = |step: &Value| {
        let text = step.get(field)?.as_str()?.to_owned();
        Some(PlanStep { text, status: status(step["status"].as_str().unwrap_or_default()) })
    };
    let steps = steps.as_array()?.iter().filter_map(step).collect();
    Some(EventBody::Plan { steps })
}

fn status(word: &str) -> StepStatus {
    match word {
        "in_progress" | "inProgress" => StepStatus::InProgress,
        "completed" => StepStatus::Completed,
        _ => StepStatus::Pending,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn todos_of_a_tool_are_a_plan() {
        let input = json!({"todos": [
            {"content": "one", "status": "completed"},
            {"content": "two", "status": "in_progress"},
            {"content": "three", "status": "cancelled"},
            {"status": "pending"},
        ]});
        let step = |text: &str, status| PlanStep { text: text.into(), status };
        let steps = vec![
            step("one", StepStatus::Completed),
            step("two", StepStatus::InProgress),
            step("three", StepStatus::Pending),
        ];
        assert_eq!(in_tool_input(&input), Some(EventBody::Plan { steps }));
        assert_eq!(in_tool_input(&json!({"todos": "x"})), None);
        assert_eq!(in_tool_input(&json!({"command": "ls"})), None);
    }
}
