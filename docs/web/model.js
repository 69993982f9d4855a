// A model that `raydfl export --input wave` wrote, in a browser: samples in, answer out.
//
// `ort` is onnxruntime-web. MODEL.json, which lies beside MODEL.onnx, says the sample rate, the channel and the classes.

export class Model {
  constructor(ort, session, about) {
    this.ort = ort;
    this.session = session;
    this.about = about;
  }

  /** Load MODEL.onnx and the MODEL.json beside it; `address` is the first one's. */
  static async load(ort, address) {
    const about = await (await fetch(address.replace(/\.onnx$/, ".json"))).json();
    if (about.onnx.inputs.samples === undefined) {
      throw new Error(`${address} takes features; export the model with --input wave`);
    }
    return new Model(ort, await ort.InferenceSession.create(address), about);
  }

  /** The answer for one channel of samples at `sampleRate`: [{name, value}], the largest first. */
  async answer(samples) {
    const given = new this.ort.Tensor("float32", samples, [1, samples.length]);
    const [output] = Object.keys(this.about.onnx.outputs);
    const values = (await this.session.run({ samples: given }))[output].data;
    const rows = this.about.classes.map((name, index) => ({ name, value: values[index] }));
    return rows.sort((a, b) => b.value - a.value);
  }

  /** What the answer means: the most probable class, the classes of a set, or whether a score is anomalous. */
  verdict(rows) {
    const { threshold, has_class_from: least } = this.about;
    if (threshold !== undefined) return rows[0].value >= threshold.value ? "anomaly" : "normal";
    if (least !== undefined) return rows.filter((row) => row.value >= least).map((row) => row.name).join(", ") || "none";
    return rows[0].name;
  }

  get sampleRate() {
    return this.about.sample_rate;
  }

  /** The samples of an encoded file: decoded, at the model's rate, of the channel that the run took. */
  async decode(bytes) {
    const audio = await new OfflineAudioContext(1, 1, this.sampleRate).decodeAudioData(bytes); // resamples too
    const { channel } = this.about.front_end.samples;
    if (channel !== "mean") return audio.getChannelData(channel === "first" ? 0 : channel);
    const mean = new Float32Array(audio.length);
    for (let number = 0; number < audio.numberOfChannels; number++) {
      audio.getChannelData(number).forEach((value, index) => (mean[index] += value / audio.numberOfChannels));
    }
    return mean;
  }
}
