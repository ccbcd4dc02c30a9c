//! Reads the prices of models: the file that the setting `prices` names, then the list that comes
//! with Harvest.

use std::path::Path;

use anyhow::{Context, Result, bail};
use harvest_proto::{Money, UpstreamName};
use harvest_session::{Price, Prices};
use serde::Deserialize;

use crate::printer::Advice;

const SHIPPED: &str = include_str!("prices.toml");

const HINT: &str = "see the setting `prices` in docs/reference/config.md";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PriceFile {
    #[serde(default)]
    price: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    models: Vec<String>,
    upstream: Option<UpstreamName>,
    input: f64,
    output: f64,
    cache_read: Option<f64>,
    cache_write: Option<f64>,
    #[serde(default = "usual_context")]
    context: u64,
    #[serde(default = "usual_max_output")]
    max_output: u64,
}

fn usual_context() -> u64 {
    1_000_000
}

fn usual_max_output() -> u64 {
    128_000
}

/// The prices of a file, followed by the shipped ones.
pub(crate) fn load(file: Option<&Path>) -> Result<Prices> {
    let mut prices = match file {
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("cannot read the prices in {}", path.display()))?;
            parse(&text).with_context(|| format!("cannot use the prices in {}", path.display()))?
        }
        None => Vec::new(),
    };
    prices.extend(parse(SHIPPED).context("the shipped prices are invalid")?);
    Ok(Prices(prices))
}

fn parse(text: &str) -> Result<Vec<Price>> {
    let file: PriceFile = toml::from_str(text).map_err(|error| {
        let line = error.span().map_or(0, |span| text[..span.start].matches('\n').count()) + 1;
        Advice::new(format!("line {line}: {}", error.message()), HINT)
    })?;
    let mut prices = Vec::new();
    for entry in &file.price {
        for model in &entry.models {
            prices.push(price(entry, model).with_context(|| format!("the price of `{model}`"))?);
        }
    }
    Ok(prices)
}

fn price(entry: &Entry, model: &str) -> Result<Price> {
    if model.trim_end_matches('*').contains('*') || model.ends_with("**") {
        bail!(Advice::new("only the end of a model's name can be `*`", HINT));
    }
    // The shortest text of a number that was written with few digits is what was written.
    let dollars = |number: f64| number.to_string().parse::<Money>();
    let input = dollars(entry.input)?;
    let or_input = |number: Option<f64>| number.map_or(Ok(input), dollars);
    Ok(Price {
        upstream: entry.upstream.clone(),
        model: model.to_owned(),
        input,
        output: dollars(entry.output)?,
        cache_read: or_input(entry.cache_read)?,
        cache_write: or_input(entry.cache_write)?,
        context: entry.context,
        max_output: entry.max_output,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_prices_are_valid_and_reachable() {
        let prices = load(None).unwrap().0;
        assert!(prices.len() > 40, "{}", prices.len());
        let prefix = |price: &Price| price.model.strip_suffix('*').map(str::to_owned);
        for (index, price) in prices.iter().enumerate() {
            let hidden = prices[..index].iter().find(|earlier| {
                earlier.model == price.model
                    || prefix(earlier).is_some_and(|prefix| price.model.starts_with(&prefix))
            });
            assert_eq!(hidden, None, "{} is never reached", price.model);
            assert!(price.cache_read <= price.input && price.input <= price.output, "{price:?}");
        }
    }

    #[test]
    fn image_models_have_no_text_price() {
        let prices = load(None).unwrap().0;
        let price = |model: &str| {
            prices.iter().find(|price| match price.model.strip_suffix('*') {
                Some(prefix) => model.starts_with(prefix),
                None => model == price.model,
            })
        };
        for model in [
            "gemini-3-pro-image-preview",
            "gemini-3.1-pro-image",
            "gemini-2.5-pro-preview-tts",
            "gemini-2.5-flash-image",
            "gemini-2.5-flash-preview-tts",
            "gemini-2.5-flash-lite-image",
            "gemini-3.5-flash-image-preview",
            "gpt-image-2",
            "gpt-5-image",
        ] {
            assert_eq!(price(model), None, "{model}");
        }
        for model in [
            "gemini-3-pro-preview",
            "gemini-3.1-pro-preview-customtools",
            "gemini-2.5-pro",
            "gemini-2.5-pro-preview-06-05",
            "gemini-2.5-flash-preview-09-2025",
            "gemini-2.5-flash-lite",
        ] {
            assert!(price(model).is_some(), "{model}");
        }
    }

    #[test]
    fn own_prices_come_first() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("prices.toml");
        let text = "[[price]]\nmodels = [\"*\"]\nupstream = \"work\"\ninput = 0.125\noutput = 2\n";
        std::fs::write(&path, text).unwrap();
        let first = load(Some(&path)).unwrap().0.remove(0);
        assert_eq!((first.upstream.as_deref(), first.model.as_str()), (Some("work"), "*"));
        let micros = [first.input, first.cache_read, first.cache_write].map(Money::micros);
        assert_eq!(micros, [125_000; 3]);
        assert!(load(Some(&folder.path().join("none"))).is_err());
    }

    #[test]
    fn invalid_prices_name_the_line() {
        let error = |text: &str| format!("{:#}", parse(text).unwrap_err());
        let entry = |more: &str| format!("[[price]]\nmodels = [\"a\"]\ninput = 1\n{more}\n");
        assert!(
            error(&entry("output = \"x\"")).contains("line 4"),
            "{}",
            error(&entry("output = \"x\""))
        );
        assert!(error(&entry("output = -1")).contains("`-1` is not an amount"));
        assert!(error(&entry("output = 1\ncost = 2")).contains("unknown field"));
        assert!(
            error("[[price]]\nmodels = [\"a*b\"]\ninput = 1\noutput = 1").contains("only the end")
        );
    }
}
