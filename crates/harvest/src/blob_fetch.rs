//! Replaces the truncated tool input or output of an event with the full text from its blob.

use anyhow::{Context, Result};
use harvest_proto::{EventBody, SessionId};

use crate::client::Client;

/// Fetches the event's blob, if it has one.
pub(crate) async fn fetch(
    client: &Client,
    session: &SessionId,
    body: &mut EventBody,
) -> Result<()> {
    let Some(blob) = body.blob().cloned() else { return Ok(()) };
    let full = client.text(&format!("/v1/sessions/{session}/blobs/{}", blob.id)).await;
    fill(body, full.with_context(|| format!("cannot read {}", blob.id))?)
}

fn fill(body: &mut EventBody, full: String) -> Result<()> {
    match body {
        EventBody::ToolEnded { output, .. } => *output = full,
        EventBody::ToolStarted { input, .. } => {
            *input =
                serde_json::from_str(&full).context("the blob of a tool's input is not JSON")?;
        }
        _ => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn blob_replaces_truncated_text() {
        let mut ended =
            EventBody::ToolEnded { call: "c".into(), ok: true, output: "a…b".into(), blob: None };
        fill(&mut ended, "all".into()).unwrap();
        assert!(matches!(&ended, EventBody::ToolEnded { output, .. } if output == "all"));
        let input = json!("cut");
        let mut started = EventBody::ToolStarted {
            call: "c".into(),
            name: "Write".into(),
            kind: harvest_proto::event::ToolKind::Edit,
            input,
            parent: None,
            blob: None,
        };
        fill(&mut started, r#"{"path":"a"}"#.into()).unwrap();
        assert!(matches!(&started, EventBody::ToolStarted { input, .. } if input["path"] == "a"));
        assert!(fill(&mut started, "{".into()).is_err());
    }
}
