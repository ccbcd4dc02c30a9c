//! The whole of what an event holds only the ends of, fetched and put in their place.

use anyhow::{Context, Result};
use harvest_proto::{EventBody, SessionId};

use crate::client::Client;

/// Makes an event whole; does nothing to one that is.
pub(crate) async fn fetch(
    client: &Client,
    session: &SessionId,
    body: &mut EventBody,
) -> Result<()> {
    let Some(blob) = body.blob().cloned() else { return Ok(()) };
    let whole = client.blob(session, &blob.id).await;
    fill(body, whole.with_context(|| format!("cannot read {}", blob.id))?)
}

fn fill(body: &mut EventBody, whole: String) -> Result<()> {
    match body {
        EventBody::ToolEnded { output, .. } => *output = whole,
        EventBody::ToolStarted { input, .. } => {
            *input =
                serde_json::from_str(&whole).context("the blob of a tool's input is not JSON")?;
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
    fn a_blob_takes_the_place_of_its_ends() {
        let mut ended =
            EventBody::ToolEnded { call: "c".into(), ok: true, output: "a…b".into(), blob: None };
        fill(&mut ended, "all".into()).unwrap();
        assert!(matches!(&ended, EventBody::ToolEnded { output, .. } if output == "all"));
        let input = json!("cut");
        let mut started = EventBody::ToolStarted {
            call: "c".into(),
            name: "Write".into(),
            input,
            parent: None,
            blob: None,
        };
        fill(&mut started, r#"{"path":"a"}"#.into()).unwrap();
        assert!(matches!(&started, EventBody::ToolStarted { input, .. } if input["path"] == "a"));
        assert!(fill(&mut started, "{".into()).is_err());
    }
}
