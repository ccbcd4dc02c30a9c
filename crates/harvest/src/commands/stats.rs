//! `harvest stats`: prints what model calls used and cost.

use std::time::SystemTime;

use anyhow::Result;
use harvest_proto::{Timestamp, api::Spending};

use crate::{Invocation, cli::StatsArgs, client::Client};

pub(crate) async fn run(ctx: &Invocation, args: &StatsArgs) -> Result<u8> {
    let since = Timestamp::from(SystemTime::now()).before(args.since.into());
    let path = format!("/v1/stats?by={}&since={since}", args.by);
    let sums: Vec<Spending> = Client::find(&ctx.config)?.all(&path).await?;
    if sums.is_empty() && !ctx.print.json {
        ctx.print.note("No model call in this time cost anything");
        return Ok(0);
    }
    let by = args.by.as_str().to_uppercase();
    let headings = [&format!("{by}…"), "CALLS", "TOKENS IN", "TOKENS OUT", "COST"];
    ctx.print.list(&sums, headings, row)?;
    let unpriced: u64 = sums.iter().map(|sum| sum.unpriced_calls).sum();
    if unpriced > 0 {
        ctx.print.hint(format!(
            "{unpriced} calls are of models without a known price; add them to the file that the \
             setting `prices` names"
        ));
    }
    Ok(0)
}

fn row(sum: &Spending) -> [String; 5] {
    let usage = sum.usage;
    let read = usage.input_tokens + usage.cache_read_tokens + usage.cache_write_tokens;
    [
        if sum.name.is_empty() { "–".to_owned() } else { sum.name.clone() },
        sum.calls.to_string(),
        read.to_string(),
        usage.output_tokens.to_string(),
        sum.spent_micros.to_string(),
    ]
}
