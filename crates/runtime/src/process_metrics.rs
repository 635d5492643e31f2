//! Metrics of the process with the names that Prometheus defines, and the version of the operator.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};

/// Reads the values from `/proc` when Prometheus reads the metrics. Omits a value that cannot be read.
#[derive(Debug)]
pub(crate) struct ProcessMetrics;

impl Collector for ProcessMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let status = read("/proc/self/status");
        let times = Times::parse(&read("/proc/self/stat"), &read("/proc/stat"));
        let files = std::fs::read_dir("/proc/self/fd").map(Iterator::count);
        let gauges = [
            (
                "process_resident_memory_bytes",
                "Resident memory",
                number(&status, "VmRSS:").map(|kibibytes| kibibytes * 1024),
            ),
            ("process_threads", "Threads", number(&status, "Threads:")),
            (
                "process_open_fds",
                "Open file descriptors",
                files.ok().and_then(|count| i64::try_from(count).ok()),
            ),
            (
                "process_start_time_seconds",
                "Start time of the process, in seconds since 1970",
                times.as_ref().map(|times| times.start_seconds),
            ),
        ];
        for (name, help, value) in gauges {
            if let Some(value) = value {
                let gauge = ConstGauge::new(value);
                gauge.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
            }
        }
        if let Some(times) = times {
            let counter = ConstCounter::new(times.cpu_seconds);
            let help = "CPU time of the process";
            let name = "process_cpu_seconds";
            counter.encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)?;
        }
        let info = Family::<Vec<(&str, &str)>, Gauge>::default();
        let version = ("version", env!("CARGO_PKG_VERSION"));
        info.get_or_create(&vec![version]).set(1);
        let help = "1, with the version of the operator as a label";
        let name = "etcd_operator_build_info";
        info.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)
    }
}

/// The number in a field of `/proc/self/status`. `None` if the field is missing.
fn number(status: &str, field: &str) -> Option<i64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse().ok()
}

#[derive(Debug, PartialEq)]
struct Times {
    cpu_seconds: f64,
    start_seconds: i64,
}

impl Times {
    /// Parses the fields utime, stime and starttime of `/proc/self/stat`, and the boot time of `/proc/stat`
    /// (proc_pid_stat(5), proc_stat(5)). On Linux, the unit of the three fields is a hundredth of a second (`USER_HZ`).
    fn parse(process: &str, system: &str) -> Option<Self> {
        // The second field of the line is the name of the program in parentheses, which may contain spaces, so the
        // line is split after the last parenthesis.
        let (_, rest) = process.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        // The numbers of the fields are those of proc_pid_stat(5). The first field in `fields` has the number 3.
        let field = |number: usize| fields.get(number - 3).copied();
        let ticks = |number: usize| field(number)?.parse::<f64>().ok();
        let start: i64 = field(22)?.parse().ok()?;
        let boot = system
            .lines()
            .find_map(|line| line.strip_prefix("btime "))?;
        let boot: i64 = boot.trim().parse().ok()?;
        Some(Self {
            cpu_seconds: (ticks(14)? + ticks(15)?) / 100.0,
            start_seconds: boot + start / 100,
        })
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn metrics_of_running_process_are_exported() {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(ProcessMetrics));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let value = |name: &str| {
            let mut lines = text.lines();
            let value = lines.find_map(|line| line.strip_prefix(name));
            value.unwrap_or_else(|| panic!("{name} is missing in\n{text}"))
        };
        for name in [
            "process_resident_memory_bytes ",
            "process_threads ",
            "process_open_fds ",
        ] {
            assert!(value(name).parse::<i64>().unwrap() > 0, "{text}");
        }
        assert!(value("process_cpu_seconds_total ").parse::<f64>().unwrap() >= 0.0);
        let start: i64 = value("process_start_time_seconds ").parse().unwrap();
        let age = jiff::Timestamp::now().as_second() - start;
        assert!((-2..3600).contains(&age), "the process is {age} s old");
        let version = format!("{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION"));
        assert_eq!(value("etcd_operator_build_info"), version);
    }

    #[test]
    fn process_times_are_parsed_if_program_name_has_spaces() {
        let stat = "7 (a ) b) S 1 2 3 4 5 6 7 8 9 10 150 50 13 14 15 16 17 18 12345 20 21";
        let times = Times::parse(stat, "cpu 1 2\nbtime 1000\nprocesses 3\n");
        let expected = Times {
            cpu_seconds: 2.0,
            start_seconds: 1123,
        };
        assert_eq!(times, Some(expected));
        assert_eq!(Times::parse("", "btime 1000"), None);
    }
}
