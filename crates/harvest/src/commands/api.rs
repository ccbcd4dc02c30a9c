//! `harvest api`: sends any authenticated request to the server and prints the response unchanged.

use std::io::{IsTerminal, Read};

use anyhow::{Context, Result, bail};
use futures_util::StreamExt;
use reqwest::{
    Method, StatusCode,
    header::{CONTENT_TYPE, HeaderName, HeaderValue},
};

use crate::{
    Invocation,
    cli::ApiArgs,
    client::Client,
    commands::FAILED,
    printer::{Advice, write_bytes},
};

pub(crate) async fn run(ctx: &Invocation, args: ApiArgs) -> Result<u8> {
    let method = Method::from_bytes(args.method.to_ascii_uppercase().as_bytes()).map_err(|_| {
        Advice::new(
            format!("`{}` is not an HTTP method", args.method),
            "use GET, POST, PUT, PATCH or DELETE",
        )
    })?;
    let headers = args.headers.iter().map(|text| header(text)).collect::<Result<Vec<_>>>()?;
    let body = args.data.as_deref().map(body).transpose()?;
    let client = Client::find(&ctx.config)?;
    let response = client.raw(method, &path(&args.path), headers, body).await?;
    let status = response.status();
    if args.include {
        ctx.print.note(format!("HTTP {status}"));
        for (name, value) in response.headers() {
            ctx.print.note(format!("{name}: {}", String::from_utf8_lossy(value.as_bytes())));
        }
    }
    let is_json = response.headers().get(CONTENT_TYPE).is_some_and(|kind| {
        let kind = kind.to_str().unwrap_or_default();
        kind.starts_with("application/json") || kind.starts_with("application/problem+json")
    });
    if is_json && std::io::stdout().is_terminal() {
        let body = response.bytes().await.context("the response broke off")?;
        ctx.print.out(&indented(&body))?;
        return Ok(exit_code(status));
    }
    let mut chunks = response.bytes_stream();
    let (mut last, terminal) = (None, std::io::stdout().is_terminal());
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.context("the response broke off")?;
        last = chunk.last().copied().or(last);
        match terminal {
            true => ctx.print.out(&String::from_utf8_lossy(&chunk))?,
            false => write_bytes(&chunk)?,
        }
    }
    if terminal && last.is_some_and(|byte| byte != b'\n') {
        ctx.print.out("\n")?;
    }
    Ok(exit_code(status))
}

fn exit_code(status: StatusCode) -> u8 {
    if status.is_client_error() || status.is_server_error() { FAILED } else { 0 }
}

/// A JSON document for people.
fn indented(body: &[u8]) -> String {
    let document = serde_json::from_slice::<serde_json::Value>(body);
    let text = document.and_then(|document| serde_json::to_string_pretty(&document));
    text.unwrap_or_else(|_| String::from_utf8_lossy(body).into_owned()) + "\n"
}

/// `sessions` is short for `/v1/sessions`.
fn path(typed: &str) -> String {
    match typed.starts_with('/') {
        true => typed.to_owned(),
        false => format!("/v1/{typed}"),
    }
}

fn header(text: &str) -> Result<(HeaderName, HeaderValue)> {
    let parsed = text.split_once(':').and_then(|(name, value)| {
        Some((name.trim().parse().ok()?, HeaderValue::from_str(value.trim()).ok()?))
    });
    match parsed {
        Some(header) => Ok(header),
        None => {
            bail!(Advice::new(format!("`{text}` is not a header"), "write it as `Name: value`"))
        }
    }
}

/// The request body: the text itself, the file after `@`, or standard input for `-`.
fn body(data: &str) -> Result<Vec<u8>> {
    match (data, data.strip_prefix('@')) {
        ("-", _) | (_, Some("-")) => {
            let mut bytes = Vec::new();
            std::io::stdin().read_to_end(&mut bytes).context("cannot read standard input")?;
            Ok(bytes)
        }
        (_, Some(file)) => std::fs::read(file).with_context(|| format!("cannot read {file}")),
        _ => Ok(data.as_bytes().to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_indented_for_people() {
        assert_eq!(indented(b"{\"a\":[1]}"), "{\n  \"a\": [\n    1\n  ]\n}\n");
        assert_eq!(indented(b"no JSON"), "no JSON\n");
    }

    #[test]
    fn short_paths_and_headers_are_parsed() {
        assert_eq!(
            (path("sessions?limit=1"), path("/healthz")),
            ("/v1/sessions?limit=1".into(), "/healthz".into())
        );
        assert!(header("X-A: b:c").is_ok_and(|(name, value)| name == "x-a" && value == "b:c"));
        for bad in ["", "x", "a b: c", "x: \u{1}"] {
            assert!(header(bad).is_err(), "{bad}");
        }
    }
}
